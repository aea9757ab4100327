"""The doctor's checks that need the bus, ZooKeeper or a run's records, and the order of all of them."""
