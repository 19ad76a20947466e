# llama.cpp's src/CMakeLists.txt includes this: it adds the C++ files of MANIFEST, a copy of which lies here, to libllama.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/MANIFEST" kvtool_sources REGEX "^src/.*[.]cpp$")
list(TRANSFORM kvtool_sources REPLACE "^src/" "kvtool/")
list(APPEND LLAMA_CORE_SOURCES ${kvtool_sources})
