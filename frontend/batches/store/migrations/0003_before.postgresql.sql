-- A live gate that stays closed for a while after the last call, and until when.

-- Without a threshold it means nothing. No CHECK says so: the release before removes a threshold and knows no more.
ALTER TABLE deployment_batch_scheduling ADD COLUMN reopen_after_s BIGINT CHECK (reopen_after_s BETWEEN 1 AND 600);
ALTER TABLE deployment_batch_signals ADD COLUMN reopens_at BIGINT;
