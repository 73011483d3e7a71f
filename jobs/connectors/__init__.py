"""The only code that touches Kafka, the lake, checkpoints and the control folder."""
