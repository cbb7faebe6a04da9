"""The step: the engine, what it executes, the sequences it holds, the loop, faults."""
