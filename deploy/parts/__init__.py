"""Each part of Roost as a process: router, tracker, planner, ranks, simulated engines, agents of static
backends."""
