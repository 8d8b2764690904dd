"""Reports on one or several finished runs: summary, curves, the HTML page. They need no process of the run."""
