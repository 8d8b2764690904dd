"""`python -m benchmarks`: regenerate RESULTS.md from the lines in results/."""

from __future__ import annotations

from benchmarks.parts.results import PAGE, page, read


def main() -> None:
    records = read()
    PAGE.write_text(page(records))
    print(f"{PAGE}: from {len(records)} lines")


if __name__ == "__main__":
    main()
