"""Steps whose truth is the source on the whole batch: each is written twice, for a rank's samples and for all."""
