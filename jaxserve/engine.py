"""EngineCore: schedule -> build -> run -> update, once a step."""
