"""The Finalizer: receipts, verification, atomic publication, delivery of rows."""
