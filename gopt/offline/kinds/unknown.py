"""Guesses the format of a file of a kind unknown to gopt."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.errors import InputError
from gopt.offline.kinds.candidate import FileCandidate


@dataclass(frozen=True, slots=True)
class FileSignature:
    """Files with ``magic`` at byte ``offset``: the format, and the way to a file for gopt."""

    magic: bytes
    offset: int
    what: str
    hint: str


_KINDS = "give a model, an output folder, a checkpoint, a manifest, a report or a record of a run"
_EXPORT = "gopt help steps says how a model of PyTorch becomes a training step"
SIGNATURES = (
    FileSignature(
        b"ORTM", 4, "a model in ONNX Runtime's own format (.ort)", "inspect the .onnx file that it was made from"
    ),
    FileSignature(b"TFL3", 4, "a TensorFlow Lite model", "convert it to ONNX first: tf2onnx --tflite reads it"),
    FileSignature(
        b"\x89HDF\r\n\x1a\n", 0, "an HDF5 file, such as Keras weights", "convert the model to ONNX first: tf2onnx"
    ),
    FileSignature(b"GGUF", 0, "a GGUF file of llama.cpp", "export the model that it was made from to ONNX"),
    FileSignature(b"\x93NUMPY", 0, "one NumPy array", "numpy.savez makes an archive of named arrays for --state"),
    FileSignature(b"PK\x03\x04", 0, "a zip archive, such as a file of torch.save", _EXPORT),
    FileSignature(b"\x80\x02", 0, "a pickle, such as an old file of torch.save: gopt never unpickles", _EXPORT),
    FileSignature(b"\x80\x04", 0, "a pickle: gopt never unpickles", _EXPORT),
    FileSignature(b"\x80\x05", 0, "a pickle: gopt never unpickles", _EXPORT),
    FileSignature(b"\x1f\x8b", 0, "a gzip archive", "unpack it first: gunzip"),
    FileSignature(b"(\xb5/\xfd", 0, "a zstandard archive", "unpack it first: unzstd"),
    FileSignature(b"\x7fELF", 0, "a program or a shared library", ""),
    FileSignature(b"%PDF", 0, "a PDF", ""),
    FileSignature(b"\x89PNG", 0, "a picture", ""),
)


def looks_like(candidate: FileCandidate) -> InputError | None:
    """Return the error for a file of another kind; None for an unknown format."""
    head = candidate.head
    for signature in SIGNATURES:
        if head[signature.offset : signature.offset + len(signature.magic)] == signature.magic:
            return InputError(
                f"{candidate.path} is not a file that gopt inspects: it looks like {signature.what}",
                signature.hint or _KINDS,
            )
    if head.lstrip().startswith((b"{", b"[")):
        return InputError(
            f"{candidate.path} is not a file that gopt inspects: it looks like JSON, but has no format of gopt",
            _KINDS,
        )
    return None
