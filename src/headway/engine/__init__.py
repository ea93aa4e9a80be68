"""The room that decides: blocks, sequences, the scheduler, the loop. It never knows torch."""
