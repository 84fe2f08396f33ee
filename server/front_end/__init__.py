"""A front-end process: takes requests in, hands them to the scheduler, answers them."""
