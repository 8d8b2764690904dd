"""The decisions of the replay: events, the state they change, the ledger, the gates. Pure: no clock of its own, no
socket, no file, no thread. Time and events come in, decisions go out; server, simulator and tests use these classes."""
