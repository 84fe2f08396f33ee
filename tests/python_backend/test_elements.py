"""Elements of BYTES: split, checked and joined."""

import pytest

from gangway.python_backend.elements import check_elements, count_elements, join_elements, split_elements, split_texts

ANY = [b"\xff\xd8\0", b"", b"\0\0", "h\u00e9".encode(), b"x" * 10_000]


@pytest.mark.parametrize("elements", [[], [b""], ANY, [b"\xff" * 100_000], [b"ab"] * 1000])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_was_joined_is_split(elements: list[bytes], kind: type) -> None:
    content = kind(join_elements(elements))
    check_elements(content, len(elements))
    found = split_elements(content, len(elements))
    assert found == elements
    assert {type(each) for each in found} <= {bytes}
    assert count_elements(content) == len(elements)


@pytest.mark.parametrize(
    ("content", "count", "reason"),
    [
        (b"", 1, "the contents end before element 0 of 1"),
        (b"\0\0\0", 1, "the contents end before element 0 of 1"),
        (b"\0\0\0\0", 2, "the contents end before element 1 of 2"),
        (b"\2\0\0\0a", 1, "element 0 has 2 bytes, but only 1 follow"),
        (b"\2\0\0\0a", 2, "element 0 has 2 bytes, but only 1 follow"),
        (b"\0\0\0\0\xff\xff\xff\xff", 2, "element 1 has 4294967295 bytes, but only 0 follow"),
        (b"\0\0\0\0x", 1, "1 bytes follow after element 0"),
        (b"x", 0, "1 bytes follow"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, count: int, reason: str) -> None:
    for look in (check_elements, split_elements, split_texts):
        with pytest.raises(ValueError, match=f"^{reason}"):
            look(memoryview(content), count)


def test_texts_are_utf_8() -> None:
    assert split_texts(join_elements(["h\u00e9".encode(), b""]), 2) == ["h\u00e9", ""]
    with pytest.raises(ValueError, match="element 1 is not UTF-8: invalid start byte"):
        split_texts(join_elements([b"a", b"\xff"]), 2)
