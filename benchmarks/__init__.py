"""What asyncrl costs and gains, measured: one question per file, one JSON line as the answer.

python -m benchmarks.NAME [--smoke] [options]        from the checkout; the line can go to benchmarks/results/NAME.jsonl
python -m benchmarks                                 makes benchmarks/RESULTS.md anew from those lines
"""
