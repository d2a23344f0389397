"""The process in which cuDNN is asked: `python -m tb_memplugin.estimate.libraries.cudnn.answers FD PATH`.

It reads (description of the GPU, convolution) pairs from a connection and sends one `Answer` for each, until
the connection is closed. The first answer comes without a question and has cuDNN's version.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tb_memplugin.estimate.libraries.cudnn.convolution import Convolution
from tb_memplugin.estimate.libraries.cudnn.library import CudnnError, Descriptor, Descriptors, Library


@dataclass(frozen=True)
class Answer:
    """A number (bytes, or a version), or why there is none."""

    number: int = 0
    refusal: str = ""


def answer(library: Library, description: str, question: Convolution) -> Answer:
    """Return what cuDNN answers for a described GPU."""
    try:
        with Descriptors(library) as descriptors:
            text = description.encode()
            device = descriptors.make(Descriptor.DEVICEPROP, DEVICEPROP_JSON_REPRESENTATION=text)
            return Answer(question.workspace_bytes(descriptors, device))
    except CudnnError as error:
        return Answer(refusal=str(error))


def main() -> None:
    """Answer until the other side goes."""
    connection, path = Connection(int(sys.argv[1])), sys.argv[2]
    try:
        library = Library(path)
    except CudnnError as error:
        connection.send(Answer(refusal=str(error)))
        return
    connection.send(Answer(library.version))
    try:
        while True:
            connection.send(answer(library, *connection.recv()))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    from tb_memplugin.estimate.libraries.cudnn import (
        answers,  # so that answers are pickled under their own name
    )

    answers.main()
