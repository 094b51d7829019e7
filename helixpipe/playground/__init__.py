"""The playground: a folder of static files in which the planning core runs in a browser, through Pyodide."""
