"""Texts as the ids of tokens, by a `tokenizer.json` as Hugging Face writes it, and the package tokenizers."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gangway.protos import StatusCode
from gangway.server.errors import RequestError, internal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NO_PACKAGE: Final = (
    "texts need the package tokenizers on the server: pip install 'gangway-serve[embeddings]'; send token ids"
)
MAX_TEXT_CHARACTERS: Final = 1 << 20  # of one text: tens of times what any model reads

Text = str | tuple[str, str]  # or a pair, such as a query and a document


class Tokens(NamedTuple):
    """The tokens of one text or pair. `types`: which of a pair each is of; empty: all of the first."""

    ids: Sequence[int]
    types: Sequence[int] = ()


class TextTokenizer:
    """A tokenizer that is read from its file when it is first needed. For any thread; it takes long."""

    def __init__(self, path: str, max_tokens: int) -> None:
        self._path, self._max_tokens = path, max_tokens
        self._lock = threading.Lock()
        self._whole: Tokenizer | None = None
        self._cut: Tokenizer | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the file has been read."""
        return self._cut is not None

    def encode(self, texts: Sequence[Text], truncates: bool) -> list[Tokens]:
        """Return the tokens of each text, with those that mark its begin and end; padding is the caller's.

        `truncates`: after `max_tokens`; else texts may have more. Raises RequestError.
        """
        self.load()
        tokenizer: Any = self._cut if truncates else self._whole
        encoded = tokenizer.encode_batch_fast(texts)
        return [Tokens(each.ids, each.type_ids if isinstance(texts[0], tuple) else ()) for each in encoded]

    def prepare(self) -> None:
        """Read the file before the first text comes; what is wrong with it is told then."""
        with suppress(RequestError):
            self.load()

    def load(self) -> None:
        """Read the file, unless it has been read. Raises RequestError."""
        with self._lock:
            if self._cut is not None:
                return
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the cores are the models'
            try:
                from tokenizers import Tokenizer  # noqa: PLC0415 - it is optional, and a front end must start soon
            except ImportError:
                raise RequestError(StatusCode.UNIMPLEMENTED, NO_PACKAGE) from None
            try:
                whole, cut = Tokenizer.from_file(self._path), Tokenizer.from_file(self._path)
            except Exception as error:  # the package has no class of its own for it
                internal(f"the tokenizer cannot be read: {error}")
            for each in (whole, cut):
                each.no_padding()
            whole.no_truncation()
            cut.enable_truncation(self._max_tokens)
            self._whole, self._cut = whole, cut
