"""RESP2 on a socket that somebody else connected: page bytes go straight between the socket and page buffers.

No client library on the market reads into a caller's memory, so this speaks the few commands that pages need,
on the socket of a redis-py connection. The connection is borrowed: a batch reads all of its replies and no byte
more, so that it can go back to its pool; after any exception it cannot, and must be closed.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence

from hiradix.errors import StorageError
from hiradix.storage.kit.in_place import InPlacePage
from hiradix.storage.protocol import Page, fits, page_bytes

_BUFFER_BYTES = 1 << 16
_HEADER_BYTES = 64  # read ahead of a payload: more would be copied twice
_RECEIVE_BYTES = 1 << 18  # stays in the processor's caches between the socket and the page
_WINDOW, _WINDOW_BYTES = 32, 16 << 20
"""Caps on the requests in flight of a batched GET, in number and in bytes asked for; two are always allowed. A
server makes all replies that it is asked for before it sends any: the first have left its caches by then."""
_SET_BATCH = 16  # pages sent before the replies to those in front of them are read
_MAX_PARTS = 512  # of one sendmsg; Linux takes 1024
NIL = b"$-1"

Sock = socket.socket | ssl.SSLSocket
Frame = tuple[bytes, Page, bytes]
"""A command with a payload: the bytes in front of it, the payload, the bytes behind."""


class ReplyError(StorageError):
    """The server answered a command with an error; the stream is intact. `code` is its first word."""

    def __init__(self, text: str):
        super().__init__(text)
        self.code = text.partition(" ")[0]


class RespStream:
    """Commands and replies on a connected socket, for one thread. Raises OSError, ReplyError.

    error_codes: the first words of the errors among the replies so far.
    """

    def __init__(self, sock: Sock):
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._receive_buffer = memoryview(b"")
        self.error_codes: set[bytes] = set()

    @property
    def is_drained(self) -> bool:
        """Whether every byte that was read belonged to a reply."""
        return self._start == self._end

    # -- batches ------------------------------------------------------------------------

    def lines(self, commands: Sequence[Sequence[bytes]]) -> list[bytes]:
        """One-line replies, errors included, of `commands`."""
        self._sock.sendall(b"".join(map(encode, commands)))
        return self._lines(len(commands))

    def get_into(
        self, commands: Sequence[Sequence[bytes]], pages: Sequence[Page], ragged: bool = False
    ) -> list[bool]:
        """Bulk replies into `pages`; True where a reply had the page's length (`ragged`: or less).

        Raises ReplyError after the whole batch when a reply is an error other than WRONGTYPE.
        """
        requests = [encode(command) for command in commands]
        longest = max(map(page_bytes, pages), default=1)
        half = max(1, min(_WINDOW, _WINDOW_BYTES // max(1, longest)) // 2)
        sent, ok = 0, []
        error: ReplyError | None = None
        for index, page in enumerate(pages):
            if sent - index <= half and sent < len(requests):
                stop = index + 2 * half
                self._sock.sendall(b"".join(requests[sent:stop]))
                sent = min(len(requests), stop)
            try:
                ok.append(self._bulk_into(page, ragged))
            except ReplyError as raised:
                ok.append(False)
                if raised.code != "WRONGTYPE":
                    error = raised
        if error is not None:
            raise error
        return ok

    def set_from(self, frames: Sequence[Frame], num_sent: int = 0) -> list[bytes]:
        """Send the frames behind the first `num_sent`; the one-line replies to all, errors included.

        Replies are read when the pages behind them are sent, so that the server does not wait for these.
        """
        replies: list[bytes] = []
        for start in range(num_sent, len(frames), _SET_BATCH):
            self._send_frames(frames[start : start + _SET_BATCH])
            replies += self._lines(start - len(replies))
        return replies + self._lines(len(frames) - len(replies))

    def ask_and_set(
        self,
        questions: Sequence[Sequence[bytes]],
        frames: Sequence[Frame],
        num_unasked: int,
        wanted: Callable[[int, bytes], bool],
    ) -> tuple[list[bytes], dict[int, bytes]]:
        """One-line replies to `questions`, one for each frame, and, by place, to the frames that were sent.

        wanted: whether to send a frame, by its place and the reply to its question. The first `num_unasked`
        go with the questions, so that neither side idles while the other works.
        """
        self._sock.sendall(b"".join(map(encode, questions)))
        self._send_frames(frames[:num_unasked])
        answers = self._lines(len(questions))
        which = list(range(num_unasked))
        which += [index for index in range(num_unasked, len(frames)) if wanted(index, answers[index])]
        replies = self.set_from([frames[index] for index in which], num_unasked)
        return answers, dict(zip(which, replies, strict=True))

    # -- the wire -----------------------------------------------------------------------

    def _send_frames(self, frames: Sequence[Frame]) -> None:
        parts: list[memoryview] = []
        for head, page, tail in frames:
            parts += [memoryview(head), *page, memoryview(tail)]
        self._send(parts)

    def _lines(self, count: int) -> list[bytes]:
        return [self._line(_BUFFER_BYTES) for _ in range(count)]

    def _send(self, parts: Sequence[memoryview]) -> None:
        pending = [part.cast("B") for part in parts if part.nbytes]
        if isinstance(self._sock, ssl.SSLSocket):  # has no sendmsg
            for part in pending:
                self._sock.sendall(part)
            return
        at = 0
        while at < len(pending):
            sent = self._sock.sendmsg(pending[at : at + _MAX_PARTS])
            while at < len(pending) and sent >= len(pending[at]):
                sent -= len(pending[at])
                at += 1
            if sent:
                pending[at] = pending[at][sent:]

    def _line(self, read_ahead: int) -> bytes:
        searched = self._start
        while True:
            found = self._buffer.find(b"\r\n", searched, self._end)
            if found >= 0:
                line = bytes(self._view[self._start : found])
                self._start = found + 2
                if line[:1] == b"-":
                    self.error_codes.add(line[1:].partition(b" ")[0])
                return line
            searched -= self._start
            self._fill(read_ahead)
            searched = max(self._start, self._start + searched - 1)

    def _fill(self, limit: int) -> None:
        if self._start:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        room = self._view[self._end : self._end + limit]
        if not room:
            raise StorageError(f"a reply line is longer than {_BUFFER_BYTES} bytes")
        self._end += self._receive(room)

    def _receive(self, view: memoryview) -> int:
        received = self._sock.recv_into(view)
        if not received:
            raise ConnectionResetError("the server closed the connection")
        return received

    def _bulk_into(self, page: Page, ragged: bool) -> bool:
        line = self._line(_HEADER_BYTES)
        if line[:1] == b"-":
            raise ReplyError(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise StorageError(f"not a bulk reply: {line!r:.80}")
        if line == NIL:
            return False
        length = number_in(line)
        if length < 0:
            raise StorageError(f"not a length: {line!r:.80}")
        if not fits(length, page, ragged):
            self._skip(length)
            self._end_of_bulk()
            return False
        if isinstance(page, InPlacePage):
            self._receive_in_place(page, length)
        else:
            for view in page:
                part = view.cast("B")[:length]
                self._fill_view(part)
                length -= len(part)
        self._end_of_bulk()
        return True

    def _end_of_bulk(self) -> None:
        """Read the end of a bulk reply. Raises StorageError if the payload had another length than was said,
        as all later replies would then be misread."""
        while self._end - self._start < 2:
            self._fill(_HEADER_BYTES)
        end = bytes(self._view[self._start : self._start + 2])
        self._start += 2
        if end != b"\r\n":
            raise StorageError(f"not the end of a bulk reply: {end!r}")

    def _receive_in_place(self, page: InPlacePage, length: int) -> None:
        """The next `length` bytes, and with the last of them the beginning of what comes behind."""
        page.begin(length)
        if self._start < self._end:
            data = self._view[self._start : min(self._end, self._start + length)]
            page.write(data)
            self._start += len(data)
            length -= len(data)
        if length and not self._receive_buffer:
            self._receive_buffer = memoryview(bytearray(_RECEIVE_BYTES))
        while length:
            received = self._receive(self._receive_buffer[: length + _HEADER_BYTES])
            page.write(self._receive_buffer[: min(received, length)])
            if received > length:
                ahead = self._receive_buffer[length:received]
                self._start, self._end = 0, len(ahead)
                self._view[: len(ahead)] = ahead
                return
            length -= received

    def _fill_view(self, view: memoryview) -> None:
        done = min(self._end - self._start, len(view))
        view[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(view):
            done += self._receive(view[done:])

    def _skip(self, num_bytes: int) -> None:
        while num_bytes > 0:
            if self._start == self._end:
                self._fill(_BUFFER_BYTES)
            step = min(num_bytes, self._end - self._start)
            self._start += step
            num_bytes -= step


def number_in(line: bytes) -> int:
    """The number in an integer reply, or in the first line of a bulk one. Raises StorageError."""
    try:
        return int(line[1:])
    except ValueError:
        raise StorageError(f"not a number: {line!r:.80}") from None


def encode(command: Sequence[bytes]) -> bytes:
    """A command as an array of bulk strings."""
    return b"*%d\r\n%s" % (len(command), b"".join(_bulk(part) for part in command))


def encode_around(before: Sequence[bytes], num_bytes: int, after: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The bytes in front of and behind a payload of `num_bytes` that is one argument of a command."""
    head = b"".join(_bulk(part) for part in before)
    tail = b"".join(_bulk(part) for part in after)
    count = len(before) + 1 + len(after)
    return b"*%d\r\n%s$%d\r\n" % (count, head, num_bytes), b"\r\n" + tail


def _bulk(part: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(part), part)
