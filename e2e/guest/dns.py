"""dns.py NAME: asks the name server of this machine for the address of a name, and prints how often the server had to
ask somebody else so far (RFC 1035 messages, by hand)."""

import socket
import sys

TXT, A, CHAOS, IN = 16, 1, 3, 1


def ask(name, kind, where):
    question = b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"
    query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0" + question + bytes([0, kind, 0, where])
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    link.settimeout(20)
    link.sendto(query, ("127.0.0.1", 53))
    answer = link.recv(1000)
    assert answer[7] >= 1, answer
    return answer[len(query) + 12 :]


address = ask(sys.argv[1], A, IN)
misses = ask("misses.bind", TXT, CHAOS)
print(".".join(map(str, address)), misses[1:].decode())
