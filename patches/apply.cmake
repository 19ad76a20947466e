# Adds kvtool's patch to llama-cpp-python's build. CMake includes this file at the end of project(llama_cpp), in the
# unpacked source distribution, if it is called with
#   -DCMAKE_PROJECT_llama_cpp_INCLUDE=<absolute path of this file>
# -DKVTOOL_PATCH=OFF leaves llama.cpp unchanged, for comparisons.

set(kvtool_llama "${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp")

if(NOT DEFINED KVTOOL_PATCH)
    set(KVTOOL_PATCH ON)
endif()

if(KVTOOL_PATCH)
    if(NOT IS_DIRECTORY "${kvtool_llama}/src")
        message(FATAL_ERROR "kvtool: no llama.cpp in ${kvtool_llama}; "
            "this is not llama-cpp-python's source distribution")
    endif()

    if(NOT EXISTS "${CMAKE_CURRENT_LIST_DIR}/MANIFEST")
        message(FATAL_ERROR "kvtool: MANIFEST is missing beside apply.cmake in ${CMAKE_CURRENT_LIST_DIR}")
    endif()
    file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/MANIFEST" kvtool_files REGEX "^[^#]")

    set(kvtool_digest "")
    foreach(file IN LISTS kvtool_files)
        if(NOT EXISTS "${CMAKE_CURRENT_LIST_DIR}/${file}")
            message(FATAL_ERROR "kvtool: ${file} is missing beside apply.cmake in ${CMAKE_CURRENT_LIST_DIR}")
        endif()
        file(SHA256 "${CMAKE_CURRENT_LIST_DIR}/${file}" kvtool_sha256)
        string(APPEND kvtool_digest "${kvtool_sha256}")
    endforeach()
    string(SHA256 kvtool_digest "${kvtool_digest}")

    # pip's build names its Python in one of these variables
    set(kvtool_python "")
    foreach(variable Python3_EXECUTABLE Python_EXECUTABLE PYTHON_EXECUTABLE)
        if(NOT kvtool_python AND ${variable})
            set(kvtool_python "${${variable}}")
        endif()
    endforeach()
    if(NOT kvtool_python)
        find_program(kvtool_any_python NAMES python3 python)
        set(kvtool_python "${kvtool_any_python}")
    endif()
    if(NOT kvtool_python)
        message(FATAL_ERROR "kvtool: no Python to apply hooks.patch with; name one with -DPython3_EXECUTABLE=")
    endif()

    # the second call must report that the patch was applied before, so that a call without effect is noticed
    foreach(expected applied before)
        execute_process(
            COMMAND "${kvtool_python}" "${CMAKE_CURRENT_LIST_DIR}/apply.py"
                "${CMAKE_CURRENT_LIST_DIR}/hooks.patch" "${kvtool_llama}"
            RESULT_VARIABLE kvtool_result
            OUTPUT_VARIABLE kvtool_output
            ERROR_VARIABLE kvtool_output
            OUTPUT_STRIP_TRAILING_WHITESPACE)
        if(NOT kvtool_result EQUAL 0 OR NOT kvtool_output MATCHES "${expected}")
            message(FATAL_ERROR "kvtool: the patch does not apply to this llama.cpp (${kvtool_output}); "
                "it is for the version in ${CMAKE_CURRENT_LIST_DIR}/UPSTREAM, unchanged")
        endif()
    endforeach()

    # src/sources.cmake reads the copy of MANIFEST
    list(FILTER kvtool_files INCLUDE REGEX "^src/")
    foreach(file MANIFEST ${kvtool_files})
        string(REGEX REPLACE "^src/" "" kvtool_name "${file}")
        configure_file("${CMAKE_CURRENT_LIST_DIR}/${file}" "${kvtool_llama}/src/kvtool/${kvtool_name}" COPYONLY)
    endforeach()
    file(CONFIGURE OUTPUT "${kvtool_llama}/src/kvtool/digest.h" @ONLY
        CONTENT "#define LLAMA_KVTOOL_DIGEST \"@kvtool_digest@\"\n")
    message(STATUS "kvtool: patched, digest ${kvtool_digest}")
endif()

# llama.cpp's common library is a large part of the build, and only mtmd's programs need it. llama-cpp-python forces the
# cache entry ON; a plain variable hides it (policy CMP0126).
if(DEFINED LLAVA_BUILD AND NOT LLAVA_BUILD)
    set(LLAMA_BUILD_COMMON OFF)
endif()

# All libraries are in one folder, also those that are loaded at run time, so each looks for others next to itself. Each
# has one file name, as a wheel would contain a full copy for every further name.
set(CMAKE_INSTALL_RPATH "$ORIGIN")
if(APPLE)
    set(CMAKE_INSTALL_RPATH "@loader_path")
endif()
function(kvtool_libraries folder result)
    get_property(found DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
    get_property(below DIRECTORY "${folder}" PROPERTY SUBDIRECTORIES)
    set(libraries "")
    foreach(target IN LISTS found)
        get_target_property(type ${target} TYPE)
        if(type MATCHES "^(SHARED|MODULE)_LIBRARY$")
            list(APPEND libraries ${target})
        endif()
    endforeach()
    foreach(each IN LISTS below)
        kvtool_libraries("${each}" more)
        list(APPEND libraries ${more})
    endforeach()
    set(${result} "${libraries}" PARENT_SCOPE)
endfunction()

# amx-gcc.h corrects intrinsics of old GCCs; vulkan-old.h adds types that old Vulkan headers lack
set(kvtool_amx "${CMAKE_CURRENT_LIST_DIR}/amx-gcc.h")
set(kvtool_vulkan "${CMAKE_CURRENT_LIST_DIR}/vulkan-old.h")
function(kvtool_put_before target compilers file)
    target_compile_options(${target} PRIVATE
        "$<$<COMPILE_LANG_AND_ID:CXX,${compilers}>:SHELL:-include \"${file}\">")
endfunction()
function(kvtool_mend)
    kvtool_libraries("${CMAKE_CURRENT_SOURCE_DIR}" libraries)
    foreach(target IN LISTS libraries)
        set_property(TARGET ${target} PROPERTY VERSION)
        set_property(TARGET ${target} PROPERTY SOVERSION)
        # one target for all CPUs, or one per kind of CPU
        if(target MATCHES "^ggml-cpu")
            kvtool_put_before(${target} GNU "${kvtool_amx}")
        elseif(target STREQUAL "ggml-vulkan")
            kvtool_put_before(${target} GNU,Clang,AppleClang "${kvtool_vulkan}")
        endif()
    endforeach()
endfunction()
cmake_language(DEFER CALL kvtool_mend)
