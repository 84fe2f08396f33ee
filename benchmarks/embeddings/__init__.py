"""Embeddings of texts beside onnxruntime in a FastAPI app: same model, same tokenizer, same clients, by turns."""
