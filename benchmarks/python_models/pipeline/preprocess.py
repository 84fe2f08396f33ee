"""The model.py of the first step: bytes of an image file to a normalised image. For both servers."""

import io

import numpy as np
import triton_python_backend_utils as backend  # pyright: ignore[reportMissingImports] - the server's own
from PIL import Image

SHORT_SIDE, SIDE = 256, 224  # pixels
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
SCALE = 1 / np.array([0.229, 0.224, 0.225], np.float32)


class TritonPythonModel:
    """IMAGE: bytes of a file, [1, N] of UINT8. PIXELS: [1, 3, 224, 224] of FP32."""

    def execute(self, requests):
        """Answer each request."""
        responses = []
        for request in requests:
            content = backend.get_input_tensor_by_name(request, "IMAGE").as_numpy()
            pixels = backend.Tensor("PIXELS", normalised(content.tobytes()))
            responses.append(backend.InferenceResponse([pixels]))
        return responses


def normalised(content):
    """Decode an image, scale its short side to 256, cut the middle out, and normalise it as ImageNet's are."""
    with Image.open(io.BytesIO(content)) as file:
        image = file.convert("RGB")
    scale = SHORT_SIDE / min(image.size)
    width, height = (round(size * scale) for size in image.size)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + SIDE, top + SIDE))
    pixels = (np.asarray(image, np.float32) / np.float32(255) - MEAN) * SCALE
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])
