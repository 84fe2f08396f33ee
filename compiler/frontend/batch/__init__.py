"""What is known of tensors in a batch of any size: where rows stand in them, and how numbers depend on the batch."""
