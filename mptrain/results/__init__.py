"""What came out: one folder per run (record) and runs beside their FP32 baseline (table)."""
