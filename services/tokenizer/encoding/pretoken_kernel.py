"""Cuts text into pretokens: the matches of a byte-level vocabulary's regular expression, one behind the other.

The expressions of Llama 3 and of Qwen, whose numbers have one digit, are

    (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\\r\\n\\p{L}\\p{N}]?\\p{L}+ | \\p{N}{1,3} | \\ ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*
    | \\s*[\\r\\n]+ | \\s+(?!\\S) | \\s+

Byte 0xFF, which UTF-8 never has, is behind the text.
"""

from __future__ import annotations

import numpy as np
from numba.cpython.unsafe.numbers import leading_zeros, trailing_zeros

from services.tokenizer.encoding.bpe_kernel import code_point_at
from services.tokenizer.encoding.chunk_tables import LETTER, NUMBER, OTHER, SPACE, UNKNOWN
from services.tokenizer.encoding.kernel_compiler import find_bytes, inlined, inner

_ONE, _TWO, _THREE = (np.uint64(each) for each in (1, 2, 3))


@inner
def find_pretokens(text, begin, limit, end, tables, borders):
    """Write the ends of the pretokens that begin in `text[begin:limit]` to `borders`, as distances from `begin`.

    Returns their number and the end of the last one, or 0 and a position where a character of class UNKNOWN is.
    """
    classes = tables.classes
    count = np.uint32(0)
    at = begin
    while at < limit:
        if text[at] < 0x80 and text[at + 1] < 0x80:
            starts = _find_starts(text, at, tables.max_digits)
            if starts != 0:
                while starts != 0:
                    bit = np.intp(trailing_zeros(starts))
                    borders[count] = np.uint32(at + bit - begin)
                    count += np.uint32(1)
                    starts &= starts - _ONE
                at += bit
                continue
        kind, size = _class_at(text, at, classes)
        following, _ = _class_at(text, at + size, classes)
        if kind == UNKNOWN:
            return np.uint32(0), at
        if text[at] == ord("'") and _contraction_size(text, at) > 0:
            at += _contraction_size(text, at)
        elif kind == NUMBER:
            at = _skip(text, at, classes, NUMBER, tables.max_digits)
        elif kind == LETTER or (following == LETTER and not _is_line_end(text[at])):
            at = _skip(text, at + size, classes, LETTER, text.size)
        elif kind == OTHER or (text[at] == ord(" ") and following == OTHER):
            at = _skip(text, at + size, classes, OTHER, text.size)
            while _is_line_end(text[at]):
                at += 1
        else:
            at = _skip_spaces(text, at, end, classes)
        borders[count] = np.uint32(at - begin)
        count += np.uint32(1)
    return count, at


@inlined
def _find_starts(text, at, max_digits):
    """Return a bit for each of the 64 bytes behind a pretoken's begin at `at` that is known to begin another one.

    The bit of `at` itself is 0. The bits end where more text must be seen: at the last white space, or a character
    that is not ASCII.
    """
    beyond_ascii = find_bytes(text, at, 0x80, 0xFF)
    known = (beyond_ascii & (~beyond_ascii + _ONE)) - _ONE
    letters = (find_bytes(text, at, ord("a"), ord("z")) | find_bytes(text, at, ord("A"), ord("Z"))) & known
    numbers = find_bytes(text, at, ord("0"), ord("9")) & known
    blanks = find_bytes(text, at, ord(" "), ord(" ")) & known
    spaces = (blanks | find_bytes(text, at, ord("\t"), ord("\r"))) & known
    lines = (find_bytes(text, at, ord("\n"), ord("\n")) | find_bytes(text, at, ord("\r"), ord("\r"))) & known
    others = known & ~(letters | numbers | spaces)
    # A run of other characters takes the blank before it and the line ends behind it. An addition carries over a run.
    begins_of_others = others & ~((others | blanks) << _ONE)
    taken = ((lines + (lines & (others << _ONE))) ^ lines) & lines
    spaces &= ~taken
    lines &= ~taken
    # White space ends behind its last line end, and before its last character, which may be a prefix.
    runs = spaces & ~(spaces << _ONE)
    prefixes = spaces & ~lines
    behind_lines = prefixes & (lines << _ONE)
    starts = begins_of_others | runs | behind_lines | (prefixes & ~(spaces >> _ONE))
    starts |= letters & ~((letters | begins_of_others | prefixes) << _ONE)
    if max_digits == 1:
        starts |= numbers
    else:
        threes = numbers & ~(numbers << _ONE)
        fourths = numbers & (numbers << _ONE) & (numbers << _TWO) & (numbers << _THREE)
        while threes != 0:
            starts |= threes
            threes = (threes << _THREE) & fourths
    quotes = find_bytes(text, at, ord("'"), ord("'")) & begins_of_others & (letters >> _ONE)
    if quotes != 0:  # it may be a contraction
        known &= (quotes & (~quotes + _ONE)) - _ONE
    crossed = ((prefixes + behind_lines) ^ prefixes) & lines
    if crossed != 0:
        runs &= (crossed & (~crossed + _ONE)) - _ONE
    if crossed != 0 or spaces & (known ^ (known >> _ONE)) != 0:
        known &= (_TWO << np.uint64(63 - np.intp(leading_zeros(runs)))) - _ONE
    return starts & known & ~_ONE


@inlined
def _class_at(text, at, classes):
    """Return the class of the character at a position, which is UNKNOWN at the end, and its number of bytes."""
    code_point, size = code_point_at(text, at)
    return classes[code_point], size


@inlined
def _skip(text, at, classes, wanted, most):
    """Return the end of the characters of class `wanted` from `at` on, which are `most` at most."""
    kind, size = _class_at(text, at, classes)
    while kind == wanted and most > 0:
        at += size
        most -= 1
        kind, size = _class_at(text, at, classes)
    return at


@inlined
def _skip_spaces(text, at, end, classes):
    """Return the end of the last line in the white space from `at` on, or else what the next pretoken may leave."""
    begin, last, lines_end = at, at, 0
    kind, size = _class_at(text, at, classes)
    while kind == SPACE:
        last = at
        at += size
        if _is_line_end(text[last]):
            lines_end = at
        kind, size = _class_at(text, at, classes)
    if lines_end > 0:
        return lines_end
    return last if begin < last and at < end else at


@inlined
def _is_line_end(byte):
    return byte == ord("\n") or byte == ord("\r")


@inner
def _contraction_size(text, at):
    """Return the number of bytes of 's, 't, 're, 've, 'm, 'll or 'd at a position, or 0."""
    first, second = text[at + 1] | 0x20, text[at + 2] | 0x20
    if text[at + 1] == 0xC5 and text[at + 2] == 0xBF:  # U+017F is another small s
        return 3
    if first == ord("s") or first == ord("t") or first == ord("m") or first == ord("d"):
        return 2
    is_long = (first == ord("r") or first == ord("v")) and second == ord("e")
    return 3 if is_long or (first == ord("l") and second == ord("l")) else 0
