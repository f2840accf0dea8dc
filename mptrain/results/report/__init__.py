"""The page that `mptrain report` writes."""
