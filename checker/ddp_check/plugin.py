"""A pytest fixture that checks a training script. `pip install` registers it."""

import pytest


@pytest.fixture
def ddp_check():
    """Return a function that checks a script as the command does.

    It fails the test, with the report, if a rule fails, and returns each status by title otherwise.
    """
    from ddp_check import report  # imports PyTorch, which pytest must not do for other tests

    def check(script, *arguments, drills=(), **options):
        with report.planned(script, arguments, **options) as plan:
            verdicts = report.check(plan, drills)
            if report.exit_code(plan, verdicts):
                pytest.fail(report.text_of(plan, verdicts), pytrace=False)
        return {verdict.title: verdict.status for verdict in verdicts}

    return check
