"""From a graph to layers: one small function for each ONNX operator, and TVM's Relax for the rest."""
