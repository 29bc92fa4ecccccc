-- A claim whose line was never sent is given back: a first one leaves no row, a retry the failure it was to mend.

DROP TRIGGER batch_lines_state ON batch_lines;
CREATE TRIGGER batch_lines_state BEFORE UPDATE OF state, attempts, segment ON batch_lines FOR EACH ROW
WHEN (NOT (
    (old.state = new.state AND old.attempts = new.attempts)
    OR (old.state = 'running' AND new.state IN ('succeeded', 'failed', 'interrupted') AND old.attempts = new.attempts)
    OR (old.state = 'running' AND new.state = 'failed' AND new.attempts = old.attempts - 1)
    OR (old.state = 'failed' AND new.state = 'running' AND new.attempts = old.attempts + 1 AND old.segment IS NULL)
    OR (old.state = 'succeeded' AND new.state = 'interrupted' AND new.attempts = old.attempts AND old.segment IS NULL)))
EXECUTE FUNCTION ringserve_refuse('batch_lines: illegal state transition');

DROP TRIGGER batch_lines_kept ON batch_lines;
CREATE TRIGGER batch_lines_kept BEFORE DELETE ON batch_lines FOR EACH ROW
WHEN (old.state <> 'running' OR old.attempts > 1)
EXECUTE FUNCTION ringserve_refuse('batch_lines: rows of lines that may have run are never deleted');
