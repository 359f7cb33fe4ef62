"""A fixture of pytest that checks a training script: `pytest -p ddp_check.plugin`."""

import pytest

from ddp_check.report import line, planned, report
from ddp_check.rules import FAIL


@pytest.fixture
def ddp_check():
    """Check a script as the command does, and fail the test with the report unless it passes."""

    def check(script, *arguments, nproc=2, timeout=300, launcher=None, drills=()):
        with planned(script, arguments, nproc, timeout, launcher) as plan:
            verdicts = report(plan, drills)
        failed = [line(*one) for one in verdicts if one[1].status == FAIL]
        if failed:
            pytest.fail("\n".join(failed), pytrace=False)
        return {title: verdict.status for title, verdict in verdicts}

    return check
