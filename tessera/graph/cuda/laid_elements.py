"""Codes in the order of packed_order.py, in graphs: a code out of bytes, a byte out of codes.

Of a unit of 64 codes lane t has those of columns 8 r + 2 t + h; h is the half of a word.
"""

from __future__ import annotations

from ..element import Element


def unpacked(bits: int) -> Element:
    """The code o1 of row o0 of bytes."""
    lane, half = "o1 // 2 % 4", "o1 % 2"
    if bits == 4:
        word = f"o1 // 64 * 32 + {lane} * 8 + o1 % 64 // 32 * 4"
        low, high, other = (f"x0[o0, {word} + {at}]" for at in (
            f"{half} * 2", f"{half} * 2 + 1", f"(1 - {half}) * 2"))
        return _chosen("o1 // 8 % 4", [
            f"{low} // 64 + {high} % 2 * 4 + {high} // 128 * 8",
            f"{high} // 2 % 8 + {other} // 4 % 2 * 8",
            f"{high} // 16 % 8 + {other} // 32 % 2 * 8",
            f"{low} // 8 % 4 + {low} % 4 * 4"])
    words = (f"{lane} * 8", f"{lane} * 8 + 4", f"32 + {lane} * 4")
    pairs = [[f"x0[o0, o1 // 64 * 48 + {word} + {half} * 2 + {byte}]" for byte in (0, 1)]
             for word in words]
    (first, _), (second, _), (third, _) = pairs
    return _chosen("o1 // 8 % 8", [
        *(f"{low} // 16 + {high} % 2 * 16 + {high} // 128 * 32" for low, high in pairs),
        *(f"{high} // 2 % 32 + {high} // 64 % 2 * 32" for _, high in pairs),
        f"{first} % 16 * 2 + {third} // 4 % 2 + {third} // 8 % 2 * 32",
        f"{second} % 16 * 2 + {third} % 2 + {third} // 2 % 2 * 32"])


def packed(bits: int) -> Element:
    """The byte o1 of row o0 of codes."""
    half = "o1 % 4 // 2"
    if bits == 4:
        column = "o1 // 32 * 64 + o1 % 8 // 4 * 32 + o1 % 32 // 8 * 2"
        mine = [f"x0[o0, {column} + {half} + {8 * r}]" for r in range(4)]
        other = [f"x0[o0, {column} + 1 - {half} + {8 * r}]" for r in range(4)]
        return _chosen("o1 % 2", [
            f"{mine[0]} % 4 * 64 + {other[2]} // 8 * 32 + {mine[3]} % 4 * 8 + {other[1]} // 8 * 4"
            f" + {mine[3]} // 4",
            f"{mine[0]} // 4 % 2 + {mine[1]} % 8 * 2 + {mine[2]} % 8 * 16 + {mine[0]} // 8 * 128"])
    lane = "where(o1 % 48 < 32, o1 % 48 // 8, (o1 % 48 - 32) // 4)"
    word = "where(o1 % 48 < 32, o1 % 8 // 4, 2)"
    codes = [f"x0[o0, o1 // 48 * 64 + {lane} * 2 + {half} + {8 * r}]" for r in range(8)]
    split = [f"{codes[6]} // 2 % 16", f"{codes[7]} // 2 % 16",
             f"{codes[7]} % 2 + {codes[7]} // 32 * 2 + {codes[6]} % 2 * 4 + {codes[6]} // 32 * 8"]
    low = [f"{codes[i]} % 16 * 16 + {split[i]}" for i in range(3)]
    high = [f"{codes[i]} // 16 % 2 + {codes[i + 3]} % 32 * 2 + {codes[i + 3]} // 32 * 64"
            f" + {codes[i]} // 32 * 128" for i in range(3)]
    return _chosen(f"{word} * 2 + o1 % 2", [text for both in zip(low, high, strict=True)
                                            for text in both])


def _chosen(number: str, texts: list[str]) -> Element:
    """The text of that number."""
    made = texts[-1]
    for i, text in reversed([*enumerate(texts[:-1])]):
        made = f"where({number} == {i}, {text}, {made})"
    return Element(made)


__all__ = ["packed", "unpacked"]
