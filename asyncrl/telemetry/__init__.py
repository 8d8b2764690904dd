"""What a run says of itself. A trace of its spans (`trace`) stands beside the rooms. No torch."""
