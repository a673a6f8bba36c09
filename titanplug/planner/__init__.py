"""What a run will cost, worked out from numbers alone: no process is started, no tensor made."""
