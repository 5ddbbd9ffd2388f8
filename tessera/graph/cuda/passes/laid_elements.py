"""Codes in the order of packed_order.py, in graphs: a code out of bytes, a byte out of codes."""

from __future__ import annotations

from ...element import Element

BESIDE_FP8 = "fp8_e4m3"


def unpacked(bits: int, beside: str) -> Element:
    """The code o1 of row o0 of bytes."""
    make = _beside_fp8 if beside == BESIDE_FP8 else _beside_halves
    return make(bits)


def packed(bits: int, beside: str) -> Element:
    """The byte o1 of row o0 of codes."""
    make = _to_bytes if beside == BESIDE_FP8 else _to_halves
    return make(bits)


# --- 16 bits: lane t has columns 8 r + 2 t + h, and h is the half of a word -----------------------
def _beside_halves(bits: int) -> Element:
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


def _to_halves(bits: int) -> Element:
    half = "o1 % 4 // 2"
    if bits == 4:
        column = "o1 // 32 * 64 + o1 % 8 // 4 * 32 + o1 % 32 // 8 * 2"
        mine = [f"x0[o0, {column} + {half} + {8 * r}]" for r in range(4)]
        other = [f"x0[o0, {column} + 1 - {half} + {8 * r}]" for r in range(4)]
        return _chosen("o1 % 2", [
            f"{mine[0]} % 4 * 64 + {other[2]} // 8 * 32 + {mine[3]} % 4 * 8 + {other[1]} // 8 * 4"
            f" + {mine[3]} // 4",
            f"{mine[0]} // 4 % 2 + {mine[1]} % 8 * 2 + {mine[2]} % 8 * 16 + {mine[0]} // 8 * 128"])
    codes = [f"x0[o0, o1 // 48 * 64 + {LANE} * 2 + {half} + {8 * r}]" for r in range(8)]
    split = [f"{codes[6]} // 2 % 16", f"{codes[7]} // 2 % 16",
             f"{codes[7]} % 2 + {codes[7]} // 32 * 2 + {codes[6]} % 2 * 4 + {codes[6]} // 32 * 8"]
    low = [f"{codes[i]} % 16 * 16 + {split[i]}" for i in range(3)]
    high = [f"{codes[i]} // 16 % 2 + {codes[i + 3]} % 32 * 2 + {codes[i + 3]} // 32 * 64"
            f" + {codes[i]} // 32 * 128" for i in range(3)]
    return _chosen(f"{WORD} * 2 + o1 % 2", [text for both in zip(low, high, strict=True)
                                            for text in both])


# --- fp8: lane t has columns 16 r + 4 t + h, and h is the byte of a word --------------------------
def _beside_fp8(bits: int) -> Element:
    lane, byte = "o1 // 4 % 4", "o1 % 4"
    if bits == 4:
        b = f"x0[o0, o1 // 64 * 32 + {lane} * 8 + o1 % 64 // 32 * 4 + {byte}]"
        return _chosen("o1 // 16 % 2", [f"{b} // 4 % 8 + {b} // 128 * 8",
                                        f"{b} % 4 + {b} // 64 % 2 * 4 + {b} // 32 % 2 * 8"])
    held = [f"x0[o0, o1 // 64 * 48 + {word} + {byte}]" for word in (
        f"{lane} * 8", f"{lane} * 8 + 4", f"32 + {lane} * 4")]
    return _chosen("o1 // 16 % 4", [
        *(f"{b} % 32 + {b} // 128 * 32" for b in held),
        f"{held[2]} // 32 % 2 + {held[1]} // 32 % 4 * 2 + {held[0]} // 32 % 4 * 8"
        f" + {held[2]} // 64 % 2 * 32"])


def _to_bytes(bits: int) -> Element:
    if bits == 4:
        column = "o1 // 32 * 64 + o1 % 8 // 4 * 32 + o1 % 32 // 8 * 4 + o1 % 4"
        first, last = f"x0[o0, {column}]", f"x0[o0, {column} + 16]"
        return Element(f"{first} % 8 * 4 + {first} // 8 * 128 + {last} % 4 + {last} // 4 % 2 * 64"
                       f" + {last} // 8 * 32")
    column = f"o1 // 48 * 64 + {LANE} * 4 + o1 % 4"
    mine, last = f"x0[o0, {column} + {WORD} * 16]", f"x0[o0, {column} + 48]"
    split = _chosen(WORD, [f"{last} // 8 % 4 * 32", f"{last} // 2 % 4 * 32",
                           f"{last} % 2 * 32 + {last} // 32 * 64"])
    return Element(f"{mine} % 32 + {mine} // 32 * 128 + {split.text}")


LANE = "where(o1 % 48 < 32, o1 % 48 // 8, (o1 % 48 - 32) // 4)"  # of a byte of 48
WORD = "where(o1 % 48 < 32, o1 % 8 // 4, 2)"  # of its lane


def _chosen(number: str, texts: list[str]) -> Element:
    """The text of that number."""
    made = texts[-1]
    for i, text in reversed([*enumerate(texts[:-1])]):
        made = f"where({number} == {i}, {text}, {made})"
    return Element(made)


__all__ = ["packed", "unpacked"]
