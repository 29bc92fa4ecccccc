-- A claim whose line was never sent is given back: a first one leaves no row, a retry the failure it was to mend.

DROP TRIGGER batch_lines_state;
CREATE TRIGGER batch_lines_state BEFORE UPDATE OF state, attempts, segment ON batch_lines
WHEN NOT (
    (old.state = new.state AND old.attempts = new.attempts)
    OR (old.state = 'running' AND new.state IN ('succeeded', 'failed', 'interrupted') AND old.attempts = new.attempts)
    OR (old.state = 'running' AND new.state = 'failed' AND new.attempts = old.attempts - 1)
    OR (old.state = 'failed' AND new.state = 'running' AND new.attempts = old.attempts + 1 AND old.segment IS NULL)
    OR (old.state = 'succeeded' AND new.state = 'interrupted' AND new.attempts = old.attempts AND old.segment IS NULL))
BEGIN SELECT RAISE(ABORT, 'batch_lines: illegal state transition'); END;

DROP TRIGGER batch_lines_kept;
CREATE TRIGGER batch_lines_kept BEFORE DELETE ON batch_lines
WHEN old.state <> 'running' OR old.attempts > 1
BEGIN SELECT RAISE(ABORT, 'batch_lines: rows of lines that may have run are never deleted'); END;
