"""What a survey of faults must not take for one that was seen. Collected by its name alone."""


def test_loops() -> None:
    while True:
        pass
