"""Benchmarks of what asyncrl costs and gains. Each file asks one question and answers it with one JSON line.

python -m benchmarks.NAME [--smoke] [options]        from the checkout; keep the line in benchmarks/results/NAME.jsonl
python -m benchmarks                                 regenerates benchmarks/RESULTS.md from the kept lines
"""
