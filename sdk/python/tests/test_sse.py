"""Server-sent events: borders of chunks mean nothing."""

from __future__ import annotations

import unittest

from keiki._sse import Decoder, Event


def events(chunks: list[bytes]) -> list[Event]:
    decoder = Decoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


STREAM = (
    'event: stdout\ndata: {"chunk":"é\u2028"}\n\n: ping\n\nevent: exit\r\ndata:{"exit_code":0}\r\n\r\n'
).encode()
EVENTS = [Event("stdout", '{"chunk":"é\u2028"}'), Event("exit", '{"exit_code":0}')]


class Sse(unittest.TestCase):
    def test_any_cut_gives_the_same_events(self) -> None:
        for at in range(len(STREAM) + 1):
            with self.subTest(at=at):
                self.assertEqual((events([STREAM[:at], STREAM[at:]])), EVENTS)
        single = [STREAM[at : at + 1] for at in range(len(STREAM))]
        self.assertEqual((events(single)), EVENTS)

    def test_lines_end_with_lf_cr_or_crlf_only(self) -> None:
        stream = "data: a\x0bb\x0cc\x1cd\x85e\u2029f\rdata: g\r\ndata: h\n\n".encode()
        expected = [Event("message", "a\x0bb\x0cc\x1cd\x85e\u2029f\ng\nh")]
        self.assertEqual((events([stream])), expected)
        self.assertEqual((events([stream[at : at + 1] for at in range(len(stream))])), expected)

    def test_the_last_id_holds(self) -> None:
        got = events([b"id: 4-0\ndata: 1\n\ndata: 2\n\nid\ndata: 3\n\n"])
        self.assertEqual([(event.data, event.id) for event in got], [("1", "4-0"), ("2", "4-0"), ("3", "")])

    def test_one_lf_belongs_to_a_cr_and_no_more(self) -> None:
        self.assertEqual(events([b"data: a\r", b"\n", b"\n"]), [Event("message", "a")])

    def test_an_event_that_was_cut_off_is_dropped(self) -> None:
        self.assertEqual((events([b"data: whole\n\ndata: half\n"])), [Event("message", "whole")])

    def test_a_name_holds_for_one_event(self) -> None:
        got = events([b"event: a\n\ndata: 1\n\nevent: b\ndata: 2\n\ndata: 3\n\n"])
        self.assertEqual(got, [Event("message", "1"), Event("b", "2"), Event("message", "3")])


if __name__ == "__main__":
    unittest.main()
