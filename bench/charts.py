async def run(bench):
    pass
