"""Pipeline parallel: schedules as data, the stages of a module and what runs them."""
