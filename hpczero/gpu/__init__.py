"""Arrays only: the optimizer's arithmetic, as torch functions that every kernel must equal."""
