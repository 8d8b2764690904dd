"""Groups of settings that a package reads by itself, below `asyncrl.schema`, which puts them together. Nothing here
knows that package, or imports torch, so that a config is checked in a blink."""
