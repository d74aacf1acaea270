"""Values shared by planning, execution and the control loop: engine, plan, cost model and move history.
Pure."""
