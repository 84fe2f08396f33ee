"""Records the corpus of the wire from the server of this checkout: `python -m tests.wire.record`.

Each case is sent to fresh servers, several times. What is answered differently from time to time is printed: a case
should have one answer.
"""

import argparse
import sys
from dataclasses import replace

from tests.wire import grpc_requests, http_requests
from tests.wire.corpus import Answer, Case, path_of
from tests.wire.served import FLAGS, playing, written_repository

REQUESTS = {"grpc": grpc_requests.cases, "http": http_requests.cases}
ROUNDS = 3


def main() -> int:
    """Write the files of both protocols."""
    parser = argparse.ArgumentParser(description="Record the corpus of the wire.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fresh servers that each case is sent to")
    rounds = parser.parse_args().rounds
    asked = {protocol: list(cases()) for protocol, cases in REQUESTS.items()}
    found: dict[tuple[str, str, str], list[Answer]] = {}
    with written_repository() as repository:
        for _ in range(rounds):
            for name in FLAGS:
                with playing(repository, name) as played:
                    for protocol, cases in asked.items():
                        for case in (each for each in cases if each.server == name):
                            answers = found.setdefault((protocol, name, case.name), [])
                            answer = played.answer(protocol, case)
                            if answer not in answers:
                                answers.append(answer)
    for protocol, cases in asked.items():
        names = [(case.server, case.name) for case in cases]
        assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
        recorded = [_with(case, found[protocol, case.server, case.name]) for case in cases]
        path_of(protocol).write_text("".join(f"{case.line()}\n" for case in recorded))
        print(f"{path_of(protocol)}: {len(cases)} cases, {path_of(protocol).stat().st_size} bytes")
    return 0


def _with(case: Case, answers: list[Answer]) -> Case:
    if len(answers) > 1:
        print(f"{case.name} ({case.server}) has several answers: {answers}")
    return replace(case, answers=answers)


if __name__ == "__main__":
    sys.exit(main())
