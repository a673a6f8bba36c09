"""Pipeline schedules as data: names, orders, tables with messages, and what they cost."""
