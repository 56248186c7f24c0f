"""Nothing that belongs to the process is changed: thread counts, affinity, environment, modes, signal handlers."""

import background


def test_a_process_is_the_same_before_and_after():
    done, _ = background.result("test_a_process_is_the_same_before_and_after")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "nothing has changed"
