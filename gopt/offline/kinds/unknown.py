"""Guesses the format of a file of no kind that gopt inspects."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.errors import InputError
from gopt.offline.kinds.candidate import Candidate


@dataclass(frozen=True, slots=True)
class Look:
    """Files that have ``magic`` at byte ``offset``: what they look like, and what leads to something gopt reads."""

    magic: bytes
    offset: int
    what: str
    hint: str


_EXPORT = "docs/inspect.md shows how a model of PyTorch becomes a training step"
LOOKS = (
    Look(b"ORTM", 4, "a model in ONNX Runtime's own format (.ort)", "inspect the .onnx file that it was made from"),
    Look(b"TFL3", 4, "a TensorFlow Lite model", "convert it to ONNX first: tf2onnx --tflite reads it"),
    Look(b"\x89HDF\r\n\x1a\n", 0, "an HDF5 file, such as Keras weights", "convert the model to ONNX first: tf2onnx"),
    Look(b"GGUF", 0, "a GGUF file of llama.cpp", "export the model that it was made from to ONNX"),
    Look(b"\x93NUMPY", 0, "one NumPy array", "numpy.savez makes an archive of named arrays for --state"),
    Look(b"PK\x03\x04", 0, "a zip archive, such as a file of torch.save", _EXPORT),
    Look(b"\x80\x02", 0, "a pickle, such as an old file of torch.save: gopt never unpickles", _EXPORT),
    Look(b"\x80\x04", 0, "a pickle: gopt never unpickles", _EXPORT),
    Look(b"\x80\x05", 0, "a pickle: gopt never unpickles", _EXPORT),
    Look(b"\x1f\x8b", 0, "a gzip archive", "unpack it first: gunzip"),
    Look(b"(\xb5/\xfd", 0, "a zstandard archive", "unpack it first: unzstd"),
    Look(b"\x7fELF", 0, "a program or a shared library", ""),
    Look(b"%PDF", 0, "a PDF", ""),
    Look(b"\x89PNG", 0, "a picture", ""),
)


def looks_like(candidate: Candidate) -> InputError | None:
    """Return the error for a file of another kind; None if the format cannot be guessed."""
    head = candidate.head
    for look in LOOKS:
        if head[look.offset : look.offset + len(look.magic)] == look.magic:
            hints = [look.hint] if look.hint else []
            return InputError(f"{candidate.path} is not a file that gopt inspects: it looks like {look.what}", *hints)
    if head.lstrip().startswith((b"{", b"[")):
        return InputError(
            f"{candidate.path} is not a file that gopt inspects: it looks like JSON, but has no format of gopt"
        )
    return None
