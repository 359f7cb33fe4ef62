"""A fixture of pytest that checks a training script: `pytest -p check_plugin`."""

import check
import pytest


@pytest.fixture
def ddp_check():
    """Check a script as check.py does, and fail the test with the report unless it passes."""

    def run(script, *arguments, nproc=2, timeout=300, launcher=None, drills=()):
        with check.planned(script, arguments, nproc, timeout, launcher) as plan:
            verdicts = check.report(plan, drills)
        failed = [check.line(*one) for one in verdicts if one[1].status == check.FAIL]
        if failed:
            pytest.fail("\n".join(failed), pytrace=False)
        return {title: verdict.status for title, verdict in verdicts}

    return run
