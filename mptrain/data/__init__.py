"""What is trained on: one file a modality, embedded samples with their licences in samples/."""
