"""Texts as the ids of tokens, by a `tokenizer.json` as Hugging Face writes it, and the package tokenizers."""

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gangway.protos import StatusCode
from gangway.server.errors import RequestError, internal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_log = logging.getLogger(__name__)

NO_PACKAGE: Final = (
    "texts need the package tokenizers on the server: pip install 'gangway-serve[embeddings]'; send token ids"
)
MAX_TEXT_CHARACTERS: Final = 1 << 20  # of one text: tens of times what any model reads

Text = str | tuple[str, str]  # or a pair, such as a query and a document


class Tokens(NamedTuple):
    """The tokens of one text or pair. `types`: which of a pair each is of; empty: all of the first."""

    ids: Sequence[int]
    types: Sequence[int] = ()


class Vocabulary(NamedTuple):
    """What ids of a tokenizer have in common. `size`: they are less. `begin`: with which each text begins, if any."""

    size: int
    begin: int | None


class TextTokenizer:
    """A tokenizer that is read from its file when it is first needed. For any thread; it takes long.

    To read a file, the package holds Python's lock: 30 ms for 30 000 words.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._vocabulary: Vocabulary | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the file has been read."""
        return self._tokenizer is not None

    def encode(self, texts: Sequence[Text], most: int | None = None) -> list[Tokens]:
        """Return the tokens of each text, with those that mark its begin and end; padding is the caller's.

        `most`: what has more is cut to so many, by the last ones before the mark of the end. Raises RequestError.
        """
        tokenizer: Any = self._tokenizer or self._loaded()
        rows = []
        for each in tokenizer.encode_batch_fast(texts):
            ids, types = each.ids, each.type_ids if isinstance(texts[0], tuple) else ()
            if most is not None and len(ids) > most:
                end = next((at for at, mark in enumerate(reversed(each.special_tokens_mask)) if not mark), len(ids))
                kept = [*range(most - end), *range(len(ids) - end, len(ids))]
                ids, types = [ids[at] for at in kept], [types[at] for at in kept] if types else ()
            rows.append(Tokens(ids, types))
        return rows

    def vocabulary(self) -> Vocabulary | None:
        """Return what its ids have in common; None if the file cannot be read."""
        with suppress(RequestError):
            self._loaded()
        return self._vocabulary

    def prepare(self) -> None:
        """Read the file before the first text comes; what is wrong with it is logged, and each text is refused."""
        try:
            self._loaded()
        except RequestError as error:
            if error.message != NO_PACKAGE:  # of which the supervisor warns
                _log.warning("%s: %s: texts are refused", self._path, error.message)

    def _loaded(self) -> "Tokenizer":
        with self._lock:
            if self._tokenizer is None:
                os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the cores are the models'
                try:
                    from tokenizers import Tokenizer  # noqa: PLC0415 - it is optional, and a front end must start soon
                except ImportError:
                    raise RequestError(StatusCode.UNIMPLEMENTED, NO_PACKAGE) from None
                try:
                    tokenizer = Tokenizer.from_file(self._path)
                except Exception as error:  # the package has no class of its own for it
                    internal(f"the tokenizer cannot be read: {error}")
                tokenizer.no_padding()
                tokenizer.no_truncation()
                word = tokenizer.encode("a")
                begin = word.ids[0] if word.special_tokens_mask[:1] == [1] else None
                self._vocabulary = Vocabulary(tokenizer.get_vocab_size(), begin)
                self._tokenizer = tokenizer
            return self._tokenizer
