"""What only `asyncrl quickstart` and `experiment=smoke/NAME` use: their rows, their tokenizer, and small models made by
plain supervised loops (one process, CPU, seconds to minutes). Nothing here is part of a run."""
