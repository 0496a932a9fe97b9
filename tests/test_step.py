"""What is said of a step that was measured just now."""

import pandas as pd
import pytest

from rungs import measure, step


@pytest.mark.parametrize(("arm", "word"), [(measure.TWIN, "the twin"), (measure.CONTROL, "the control")])
def test_a_step_whose_twin_or_control_is_flagged_is_one_sentence(arm, word):
    rows = pd.DataFrame(
        {"round": r, "arm": a, "time_us": 10.0, "status": "flagged" if a == arm else "ok", "reason": ""}
        for r in range(6)
        for a in ("source", "target", measure.TWIN, measure.CONTROL)
    )
    said = f"not measured: {word} could not be timed beside target in any usable round."
    assert step._sentence(rows, "source", "target") == (False, said)
