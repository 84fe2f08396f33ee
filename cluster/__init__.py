"""Several servers: `gangway route` distributes calls over them, `gangway place` distributes models."""
