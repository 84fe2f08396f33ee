"""ONNX files to artifacts. Runs in processes of its own, at lowest priority; the only room that imports TVM."""
